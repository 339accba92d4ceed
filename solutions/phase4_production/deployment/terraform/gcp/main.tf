# The same cluster on Google Cloud: A3 machines (eight H100 each) close together, Filestore as the
# shared file system, no address outside, SSH through Identity-Aware Proxy from no range at all:
#
#     gcloud compute ssh imagenet-0 --tunnel-through-iap
#
# Variables have the names of the AWS variant.

terraform {
  required_version = ">= 1.7"

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "~> 6.0"
    }
  }
}

variable "project" {
  description = "Google Cloud project."
  type        = string
}

variable "name" {
  type    = string
  default = "imagenet"
}

variable "region" {
  type    = string
  default = "us-central1"
}

variable "availability_zone" {
  type    = string
  default = "us-central1-a"
}

variable "instance_type" {
  type    = string
  default = "a3-highgpu-8g"
}

variable "gpus_per_node" {
  description = "GPUs of the instance type: one rank each."
  type        = number
  default     = 8
}

variable "cluster_size" {
  type    = number
  default = 2
}

variable "training_epochs" {
  type    = number
  default = 90
}

variable "save_frequency" {
  type    = number
  default = 500
}

variable "config" {
  type    = string
  default = "configs/resnet50_imagenet.yaml"
}

variable "repository" {
  type = string
}

variable "revision" {
  type    = string
  default = "main"
}

variable "storage_gib" {
  type    = number
  default = 2560
}

provider "google" {
  project = var.project
  region  = var.region
  zone    = var.availability_zone
}

locals {
  range = "10.30.0.0/20"
  head  = cidrhost(local.range, 16)
}

resource "google_compute_network" "this" {
  name                    = var.name
  auto_create_subnetworks = false
  mtu                     = 8896
}

resource "google_compute_subnetwork" "nodes" {
  name                     = "${var.name}-nodes"
  network                  = google_compute_network.this.id
  region                   = var.region
  ip_cidr_range            = local.range
  private_ip_google_access = true
}

resource "google_compute_router" "this" {
  name    = var.name
  network = google_compute_network.this.id
  region  = var.region
}

resource "google_compute_router_nat" "this" {
  name                               = var.name
  router                             = google_compute_router.this.name
  region                             = var.region
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"
}

resource "google_compute_firewall" "nodes_among_themselves" {
  name        = "${var.name}-among-themselves"
  network     = google_compute_network.this.id
  source_tags = [var.name]
  target_tags = [var.name]

  allow {
    protocol = "all"
  }
}

# The range from which Identity-Aware Proxy forwards SSH; who may use it is a matter of IAM.
resource "google_compute_firewall" "ssh" {
  name          = "${var.name}-ssh"
  network       = google_compute_network.this.id
  source_ranges = ["35.235.240.0/20"]
  target_tags   = [var.name]

  allow {
    protocol = "tcp"
    ports    = ["22"]
  }
}

resource "google_compute_resource_policy" "nodes" {
  name   = "${var.name}-nodes"
  region = var.region

  group_placement_policy {
    vm_count    = var.cluster_size
    collocation = "COLLOCATED"
  }
}

resource "google_filestore_instance" "shared" {
  name     = var.name
  tier     = "ZONAL"
  location = var.availability_zone

  file_shares {
    name        = "shared"
    capacity_gb = var.storage_gib
  }

  networks {
    network = google_compute_network.this.name
    modes   = ["MODE_IPV4"]
  }
}

resource "google_compute_instance" "node" {
  count = var.cluster_size

  name              = "${var.name}-${count.index}"
  machine_type      = var.instance_type
  tags              = [var.name]
  resource_policies = [google_compute_resource_policy.nodes.id]

  boot_disk {
    initialize_params {
      image = "deeplearning-platform-release/common-cu129-ubuntu-2204-nvidia-570"
      size  = 200
      type  = "pd-ssd"
    }
  }

  network_interface {
    subnetwork = google_compute_subnetwork.nodes.id
    network_ip = cidrhost(local.range, 16 + count.index)
    nic_type   = "GVNIC"
  }

  scheduling {
    on_host_maintenance = "TERMINATE" # GPUs can't be moved while they run
    automatic_restart   = true
  }

  shielded_instance_config {
    enable_secure_boot = false # the NVIDIA driver is not signed
  }

  metadata = {
    enable-oslogin = "TRUE"

    user-data = templatefile("${path.module}/cloud-init.yaml.tftpl", {
      repository = var.repository
      revision   = var.revision
      nodes      = var.cluster_size
      rank       = count.index
      ranks      = var.gpus_per_node
      head       = local.head
      storage    = "${google_filestore_instance.shared.networks[0].ip_addresses[0]}:/shared"
      config     = var.config
      epochs     = var.training_epochs
      save_every = var.save_frequency
    })
  }
}

output "nodes" {
  value = google_compute_instance.node[*].network_interface[0].network_ip
}
