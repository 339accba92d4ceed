# The same cluster on Google Cloud: A3 Mega machines (a3-megagpu-8g, eight H100 each) close together, the
# file system of storage/, no address outside, SSH through Identity-Aware Proxy:
#
#     gcloud compute ssh imagenet-0 --tunnel-through-iap
#
# NOT VALIDATED: formatted, but neither validated against the provider nor applied to a project.
#
# Versions that fit each other:
#   image      Ubuntu 24.04 with NVIDIA driver 580, of 2026-05-22: the one of Google's Cluster Toolkit for
#              this machine (examples/machine-learning/a3-megagpu-8g/a3mega-slurm-blueprint.yaml, 1047080)
#   Python     3.12, Ubuntu 24.04's, for which requirements.txt is pinned
#   torch      2.15.0 with CUDA 13.2 (requirements.txt); CUDA 13.x needs driver 580 or newer (NVIDIA, CUDA
#              Compatibility, "Minor Version Compatibility", table 1)
#   provider   google 6.50
#
# The machine has nine network cards: one for everything, and eight for the GPUs. Each of the eight needs a
# network of its own, with an MTU of 8244 (Google's "A3 Mega cluster overview"). NCCL uses all eight, over
# TCP. Google's faster transport, GPUDirect-TCPXO, is not set up here: it needs a kernel module, a daemon
# (RxDM) and a plugin from Google's container images, in versions that fit torch's NCCL.
#
# Variables have the names of the AWS variant.

terraform {
  required_version = ">= 1.11"

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "~> 6.50.0"
    }
  }
}

variable "storage" {
  description = "Where checkpoints and images are; storage.auto.tfvars.json, written by `terraform -chdir=storage output -json cluster`."
  type = object({
    region     = string
    zone       = string
    network    = string
    subnetwork = string
    range      = string
    address    = string
  })
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
  description = "Region of the nodes, the storage's."
  type        = string
  default     = "us-central1"

  validation {
    condition     = var.region == var.storage.region
    error_message = "region must be that of the storage, ${var.storage.region}."
  }
}

variable "instance_type" {
  description = "Machine type of the nodes; network cards and their names below are those of this one."
  type        = string
  default     = "a3-megagpu-8g"

  validation {
    condition     = var.instance_type == "a3-megagpu-8g"
    error_message = "instance_type must be a3-megagpu-8g: other types have other network cards."
  }
}

variable "cluster_size" {
  description = "Number of nodes."
  type        = number
  default     = 2
}

variable "training_epochs" {
  description = "Epochs to train for."
  type        = number
  default     = 90
}

variable "save_frequency" {
  description = "Optimizer steps from one checkpoint to the next."
  type        = number
  default     = 500
}

variable "config" {
  description = "The recipe, a file of the repository."
  type        = string
  default     = "configs/resnet50_imagenet.yaml"
}

variable "repository" {
  description = "Where the nodes clone this repository from, over https; without a password in it."
  type        = string
}

variable "revision" {
  description = "Commit, tag or branch to train with."
  type        = string
  default     = "main"
}

variable "dataset" {
  description = "Bucket and folder (gs://bucket/folder) with train/CLASS/* and val/CLASS/*; the first node copies it to the shared file system, once. null: synthetic images."
  type        = string
  default     = null

  validation {
    condition     = var.dataset == null || can(regex("^gs://[^/]+/[^/]", coalesce(var.dataset, "-")))
    error_message = "dataset must be gs://bucket/folder."
  }
}

provider "google" {
  project = var.project
  region  = var.region
  zone    = var.storage.zone
}

locals {
  gpus       = 8
  head       = cidrhost(var.storage.range, 16)
  gpu_ranges = [for card in range(8) : cidrsubnet("10.64.0.0/13", 7, card)]
  # as Ubuntu names them, in the order of the interfaces below (Cluster Toolkit,
  # examples/machine-learning/a3-megagpu-8g/nccl-tests/run-nccl-tests.sh)
  first_card = "enp0s12"
  gpu_cards  = ["enp6s0", "enp7s0", "enp13s0", "enp14s0", "enp134s0", "enp135s0", "enp141s0", "enp142s0"]

  unit = templatefile("${path.module}/../training.service.tftpl", {
    user         = "trainer"
    config       = var.config
    data         = var.dataset == null ? "synthetic" : "/shared/imagenet"
    epochs       = var.training_epochs
    save_every   = var.save_frequency
    stop_seconds = 28 # a machine that is taken away gets 30 seconds
  })
}

resource "google_compute_router" "this" {
  name    = var.name
  network = var.storage.network
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
  network     = var.storage.network
  source_tags = [var.name]
  target_tags = [var.name]

  allow {
    protocol = "all"
  }
}

# The range from which Identity-Aware Proxy forwards SSH; who may use it is a matter of IAM.
resource "google_compute_firewall" "ssh" {
  name          = "${var.name}-ssh"
  network       = var.storage.network
  source_ranges = ["35.235.240.0/20"]
  target_tags   = [var.name]

  allow {
    protocol = "tcp"
    ports    = ["22"]
  }
}

# --- a network for each GPU's card

resource "google_compute_network" "gpu" {
  count = length(local.gpu_cards)

  name                    = "${var.name}-gpu-${count.index}"
  auto_create_subnetworks = false
  mtu                     = 8244
}

resource "google_compute_subnetwork" "gpu" {
  count = length(local.gpu_cards)

  name          = "${var.name}-gpu-${count.index}"
  network       = google_compute_network.gpu[count.index].id
  region        = var.region
  ip_cidr_range = local.gpu_ranges[count.index]
}

resource "google_compute_firewall" "gpu" {
  count = length(local.gpu_cards)

  name          = "${var.name}-gpu-${count.index}"
  network       = google_compute_network.gpu[count.index].id
  source_ranges = [local.gpu_ranges[count.index]]

  allow {
    protocol = "all"
  }
}

# --- the nodes

resource "google_service_account" "nodes" {
  account_id   = "${var.name}-nodes"
  display_name = "Nodes that train; may read the images"
}

resource "google_storage_bucket_iam_member" "dataset" {
  count = var.dataset == null ? 0 : 1

  bucket = split("/", var.dataset)[2]
  role   = "roles/storage.objectViewer"
  member = google_service_account.nodes.member
}

resource "google_compute_resource_policy" "nodes" {
  name   = "${var.name}-nodes"
  region = var.region

  group_placement_policy {
    vm_count    = var.cluster_size
    collocation = "COLLOCATED"
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
      image = "projects/ubuntu-os-accelerator-images/global/images/ubuntu-accelerator-2404-amd64-with-nvidia-580-v20260522"
      size  = 200
      type  = "pd-ssd"
    }
  }

  network_interface {
    subnetwork = var.storage.subnetwork
    network_ip = cidrhost(var.storage.range, 16 + count.index)
    nic_type   = "GVNIC"
  }

  dynamic "network_interface" {
    for_each = google_compute_subnetwork.gpu

    content {
      subnetwork = network_interface.value.id
      nic_type   = "GVNIC"
    }
  }

  scheduling {
    on_host_maintenance = "TERMINATE" # GPUs can't be moved while they run
    automatic_restart   = true
  }

  service_account {
    email  = google_service_account.nodes.email
    scopes = ["cloud-platform"] # what it may do is a matter of its roles
  }

  metadata = {
    enable-oslogin = "TRUE"

    user-data = templatefile("${path.module}/cloud-init.yaml.tftpl", {
      repository  = var.repository
      revision    = var.revision
      nodes       = var.cluster_size
      rank        = count.index
      ranks       = local.gpus
      head        = local.head
      first_card  = local.first_card
      gpu_cards   = join(",", local.gpu_cards)
      storage     = var.storage.address
      dataset     = var.dataset
      unit        = local.unit
      requirement = "solutions/phase4_production/deployment/requirements.txt"
    })
  }
}

output "nodes" {
  description = "Addresses of the nodes, the one on which they meet first."
  value       = google_compute_instance.node[*].network_interface[0].network_ip
}
