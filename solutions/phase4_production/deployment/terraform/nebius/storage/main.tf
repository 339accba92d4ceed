# What must outlive every cluster on Nebius: the shared filesystem with checkpoints, logs and images. It has
# a state of its own, so that `terraform destroy` for the nodes can't touch it; here it is refused twice, by
# Terraform (prevent_destroy) and by Nebius (forbid_deletion).
#
#     terraform init && terraform apply -var project=PROJECT
#     terraform output -json cluster > ../storage.auto.tfvars.json
#
# Formatted, but neither validated nor applied: see ../main.tf, also for the credentials.

terraform {
  required_version = ">= 1.11"

  required_providers {
    nebius = {
      source  = "nebius/nebius"
      version = "0.6.32"
    }
  }
}

variable "project" {
  description = "Project of Nebius AI Cloud (its ID)."
  type        = string
}

variable "name" {
  description = "Prefix of all names."
  type        = string
  default     = "imagenet"
}

variable "storage_gib" {
  description = "Size of the shared filesystem."
  type        = number
  default     = 2048
}

provider "nebius" {
  service_account = {
    account_id_env       = "SA_ID"
    public_key_id_env    = "AUTHKEY_PUBLIC_ID"
    private_key_file_env = "AUTHKEY_PRIVATE_PATH"
  }
}

resource "nebius_compute_v1_filesystem" "shared" {
  parent_id       = var.project
  name            = "${var.name}-shared"
  type            = "NETWORK_SSD"
  size_gibibytes  = var.storage_gib
  forbid_deletion = true

  lifecycle {
    prevent_destroy = true # remove this, and the line above, on the day when the checkpoints may go
  }
}

output "cluster" {
  description = "What the nodes need to know: the variable storage of their module."
  value       = { storage = { filesystem = nebius_compute_v1_filesystem.shared.id } }
}
