# The same cluster on Nebius AI Cloud: virtual machines with eight H100 or H200 each in one GPU cluster, which
# is an InfiniBand fabric, and the shared filesystem of storage/ at /shared. The first node has the only
# address outside, and takes SSH from ssh_cidr alone.
#
# NOT VALIDATED: formatted, but neither validated against the provider nor applied to a project. Written
# after the documentation of the provider (nebius/terraform-provider-nebius 0.6.32, docs/) and the
# provider's own examples (nebius/nebius-solution-library, vm-instance and modules, b2a14f0).
#
# Credentials are those of a service account, and come from the environment:
#
#     export SA_ID=serviceaccount-…             the account
#     export AUTHKEY_PUBLIC_ID=publickey-…      its authorized key
#     export AUTHKEY_PRIVATE_PATH=…/private.pem the key's private half, which never leaves your machine
#
# Versions that fit each other: Ubuntu 24.04 with CUDA 13.0 and its driver (580), Python 3.12 as in
# requirements.txt, torch 2.15.0 with CUDA 13.2, for which driver 580 is enough.
#
# Variables have the names of the AWS variant.

terraform {
  required_version = ">= 1.11"

  required_providers {
    nebius = {
      source  = "nebius/nebius"
      version = "0.6.32"
    }
  }
}

variable "storage" {
  description = "Where checkpoints and images are; storage.auto.tfvars.json, written by `terraform -chdir=storage output -json cluster`."
  type        = object({ filesystem = string })
}

variable "project" {
  description = "Project of Nebius AI Cloud (its ID); it decides on the region."
  type        = string
}

variable "name" {
  description = "Prefix of all names."
  type        = string
  default     = "imagenet"
}

variable "region" {
  description = "Region of the project; with it come the machine and the InfiniBand fabric."
  type        = string
  default     = "eu-north1"

  validation {
    condition     = contains(["eu-north1", "eu-north2", "eu-west1", "us-central1"], var.region)
    error_message = "region must be eu-north1, eu-north2, eu-west1 or us-central1."
  }
}

variable "instance_type" {
  description = "Platform of the nodes (gpu-h100-sxm, gpu-h200-sxm); null: the region's."
  type        = string
  default     = null
}

variable "fabric" {
  description = "InfiniBand fabric of the GPU cluster, one of the region's for that platform; null: the region's."
  type        = string
  default     = null
}

variable "cluster_size" {
  description = "Number of nodes."
  type        = number
  default     = 2
}

variable "spot" {
  description = "Preemptible machines: cheaper, and Nebius may stop them; start them again, and training goes on."
  type        = bool
  default     = false
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
  description = "true: train/CLASS/* and val/CLASS/* have been copied to /shared/imagenet (output copy); false: synthetic images."
  type        = bool
  default     = false
}

variable "ssh_cidr" {
  description = "Addresses from which SSH is allowed, such as 203.0.113.7/32: the only way in."
  type        = string

  validation {
    condition     = can(cidrnetmask(var.ssh_cidr)) && try(tonumber(split("/", var.ssh_cidr)[1]), 0) >= 16
    error_message = "ssh_cidr must be an IPv4 range of at most 65536 addresses (/16 to /32)."
  }
}

variable "ssh_public_key" {
  description = "Public key that may log in (the text of ~/.ssh/id_ed25519.pub); the private one stays with you."
  type        = string

  validation {
    condition     = can(regex("^(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp[0-9]+) ", var.ssh_public_key))
    error_message = "ssh_public_key must be a public key; a private one must never get here."
  }
}

provider "nebius" {
  service_account = {
    account_id_env       = "SA_ID"
    public_key_id_env    = "AUTHKEY_PUBLIC_ID"
    private_key_file_env = "AUTHKEY_PRIVATE_PATH"
  }
}

locals {
  gpus = 8
  # nebius-solution-library, k8s-training/locals.tf
  regions = {
    eu-north1   = { platform = "gpu-h100-sxm", fabric = "fabric-3" }
    eu-north2   = { platform = "gpu-h200-sxm", fabric = "eu-north2-a" }
    eu-west1    = { platform = "gpu-h200-sxm", fabric = "fabric-5" }
    us-central1 = { platform = "gpu-h200-sxm", fabric = "us-central1-a" }
  }
  platform = coalesce(var.instance_type, local.regions[var.region].platform)
  fabric   = coalesce(var.fabric, local.regions[var.region].fabric)
  head     = "${var.name}-0.${nebius_vpc_v1_network.this.id}.compute.internal"

  unit = templatefile("${path.module}/../training.service.tftpl", {
    user         = "trainer"
    config       = var.config
    data         = var.dataset ? "/shared/imagenet" : "synthetic"
    epochs       = var.training_epochs
    save_every   = var.save_frequency
    stop_seconds = 110
  })
}

resource "nebius_vpc_v1_network" "this" {
  parent_id = var.project
  name      = var.name
}

resource "nebius_vpc_v1_subnet" "nodes" {
  parent_id  = var.project
  name       = "${var.name}-nodes"
  network_id = nebius_vpc_v1_network.this.id
}

# What no rule allows is denied.
resource "nebius_vpc_v1_security_group" "nodes" {
  parent_id  = var.project
  name       = "${var.name}-nodes"
  network_id = nebius_vpc_v1_network.this.id
}

resource "nebius_vpc_v1_security_rule" "among_themselves" {
  parent_id = nebius_vpc_v1_security_group.nodes.id
  name      = "among-themselves"
  access    = "ALLOW"
  protocol  = "ANY"

  ingress = {
    source_security_group_id = nebius_vpc_v1_security_group.nodes.id
  }
}

resource "nebius_vpc_v1_security_rule" "ssh" {
  parent_id = nebius_vpc_v1_security_group.nodes.id
  name      = "ssh"
  access    = "ALLOW"
  protocol  = "TCP"

  ingress = {
    source_cidrs      = [var.ssh_cidr]
    destination_ports = [22]
  }
}

resource "nebius_vpc_v1_security_rule" "out" {
  parent_id = nebius_vpc_v1_security_group.nodes.id
  name      = "out"
  access    = "ALLOW"
  protocol  = "ANY"

  egress = {
    destination_cidrs = ["0.0.0.0/0"]
  }
}

resource "nebius_compute_v1_gpu_cluster" "nodes" {
  parent_id         = var.project
  name              = "${var.name}-nodes"
  infiniband_fabric = local.fabric
}

resource "nebius_compute_v1_instance" "node" {
  count = var.cluster_size

  parent_id       = var.project
  name            = "${var.name}-${count.index}"
  hostname        = "${var.name}-${count.index}"
  recovery_policy = var.spot ? "FAIL" : "RECOVER"
  preemptible     = var.spot ? { on_preemption = "STOP" } : null

  resources = {
    platform = local.platform
    preset   = "8gpu-128vcpu-1600gb"
  }

  gpu_cluster = {
    id = nebius_compute_v1_gpu_cluster.nodes.id
  }

  boot_disk = {
    attach_mode = "READ_WRITE"
    managed_disk = {
      name = "${var.name}-${count.index}-boot"
      spec = {
        type                = "NETWORK_SSD"
        size_gibibytes      = 200
        source_image_family = { image_family = "ubuntu24.04-cuda13.0" }
      }
    }
  }

  filesystems = [
    {
      attach_mode         = "READ_WRITE"
      mount_tag           = "shared"
      existing_filesystem = { id = var.storage.filesystem }
    }
  ]

  network_interfaces = [
    {
      name              = "eth0"
      subnet_id         = nebius_vpc_v1_subnet.nodes.id
      ip_address        = {}
      public_ip_address = count.index == 0 ? {} : null
      security_groups   = [{ id = nebius_vpc_v1_security_group.nodes.id }]
    }
  ]

  cloud_init_user_data = templatefile("${path.module}/cloud-init.yaml.tftpl", {
    repository  = var.repository
    revision    = var.revision
    nodes       = var.cluster_size
    rank        = count.index
    ranks       = local.gpus
    head        = local.head
    key         = var.ssh_public_key
    unit        = local.unit
    requirement = "solutions/phase4_production/deployment/requirements.txt"
  })
}

locals {
  address = split("/", nebius_compute_v1_instance.node[0].status.network_interfaces[0].public_ip_address.address)[0]
}

output "ssh" {
  description = "Logs in to the first node."
  value       = "ssh admin@${local.address}"
}

output "copy" {
  description = "Copies images (train/CLASS/*, val/CLASS/*) from the folder imagenet of your machine to where all nodes see them."
  value       = "rsync --archive imagenet/ admin@${local.address}:/shared/imagenet/"
}
