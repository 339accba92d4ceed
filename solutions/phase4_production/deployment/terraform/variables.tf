variable "storage" {
  description = "Where checkpoints and images are; storage.auto.tfvars.json, written by `terraform -chdir=storage output -json cluster`."
  type = object({
    zone           = string
    vpc            = string
    subnet         = string
    cidr           = string
    security_group = string
    address        = string
    ports          = map(object({ from = number, to = number }))
    dataset        = bool
  })
}

variable "name" {
  description = "Prefix of all names, and the tag Project of all resources."
  type        = string
  default     = "imagenet"
}

variable "region" {
  description = "AWS region, the storage's."
  type        = string
  default     = "us-east-1"

  validation {
    condition     = startswith(var.storage.zone, var.region)
    error_message = "region must be that of the storage, whose zone is ${var.storage.zone}."
  }
}

variable "instance_type" {
  description = "Type of the nodes; one with EFA (p4d.24xlarge, p5.48xlarge, g5.48xlarge …) for more than one node."
  type        = string
  default     = "p4d.24xlarge"
}

variable "cluster_size" {
  description = "Number of nodes."
  type        = number
  default     = 2

  validation {
    condition     = var.cluster_size >= 1 && var.cluster_size <= 64 && floor(var.cluster_size) == var.cluster_size
    error_message = "cluster_size must be a whole number from 1 to 64."
  }
}

variable "spot" {
  description = "Spot instances: about a third of the price, and AWS may take them; training saves then and goes on later."
  type        = bool
  default     = false
}

variable "training_epochs" {
  description = "Epochs to train for."
  type        = number
  default     = 90

  validation {
    condition     = var.training_epochs >= 1 && floor(var.training_epochs) == var.training_epochs
    error_message = "training_epochs must be a whole number of at least 1."
  }
}

variable "save_frequency" {
  description = "Optimizer steps from one checkpoint to the next."
  type        = number
  default     = 500

  validation {
    condition     = var.save_frequency >= 1 && floor(var.save_frequency) == var.save_frequency
    error_message = "save_frequency must be a whole number of at least 1."
  }
}

variable "config" {
  description = "The recipe, a file of the repository."
  type        = string
  default     = "configs/resnet50_imagenet.yaml"
}

variable "repository" {
  description = "Where the nodes clone this repository from, over https; without a password in it."
  type        = string

  validation {
    condition     = can(regex("^https://[^@]+$", var.repository))
    error_message = "repository must be an https:// address without user or password."
  }
}

variable "revision" {
  description = "Commit, tag or branch to train with; a commit, so that a replaced node runs the same."
  type        = string
  default     = "main"
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
