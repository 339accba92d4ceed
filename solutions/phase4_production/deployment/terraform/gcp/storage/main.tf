# What must outlive every cluster on Google Cloud: the file system with checkpoints, logs and images, and
# the network in which it is. It has a state of its own, so that `terraform destroy` for the nodes can't
# touch it; here it is refused twice, by Terraform (prevent_destroy) and by Filestore (deletion protection).
#
#     terraform init && terraform apply -var project=PROJECT
#     terraform output -json cluster > ../storage.auto.tfvars.json
#
# Formatted, but neither validated nor applied: see ../main.tf.

terraform {
  required_version = ">= 1.11"

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "~> 6.50.0"
    }
  }
}

variable "project" {
  description = "Google Cloud project."
  type        = string
}

variable "name" {
  description = "Prefix of all names."
  type        = string
  default     = "imagenet"
}

variable "region" {
  description = "Region of the network."
  type        = string
  default     = "us-central1"
}

variable "availability_zone" {
  description = "Zone of the file system, and so of the nodes; one that has A3 Mega machines."
  type        = string
  default     = "us-central1-a"
}

variable "storage_gib" {
  description = "Size of the shared file system: 1024 to 9984, in steps of 256."
  type        = number
  default     = 2560
}

provider "google" {
  project = var.project
  region  = var.region
  zone    = var.availability_zone
}

resource "google_compute_network" "this" {
  name                    = var.name
  auto_create_subnetworks = false
  mtu                     = 8244
}

resource "google_compute_subnetwork" "nodes" {
  name                     = "${var.name}-nodes"
  network                  = google_compute_network.this.id
  region                   = var.region
  ip_cidr_range            = "10.30.0.0/20"
  private_ip_google_access = true
}

resource "google_filestore_instance" "shared" {
  name     = var.name
  tier     = "ZONAL"
  location = var.availability_zone

  deletion_protection_enabled = true
  deletion_protection_reason  = "checkpoints of trainings"

  file_shares {
    name        = "shared"
    capacity_gb = var.storage_gib
  }

  networks {
    network = google_compute_network.this.name
    modes   = ["MODE_IPV4"]
  }

  lifecycle {
    prevent_destroy = true # remove this, and the protection, on the day when the checkpoints may go
  }
}

output "cluster" {
  description = "What the nodes need to know: the variable storage of their module."
  value = {
    storage = {
      region     = var.region
      zone       = var.availability_zone
      network    = google_compute_network.this.id
      subnetwork = google_compute_subnetwork.nodes.id
      range      = google_compute_subnetwork.nodes.ip_cidr_range
      address    = "${google_filestore_instance.shared.networks[0].ip_addresses[0]}:/shared"
    }
  }
}
