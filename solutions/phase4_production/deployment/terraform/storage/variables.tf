variable "name" {
  description = "Prefix of all names, and the tag Project of all resources."
  type        = string
  default     = "imagenet"
}

variable "region" {
  description = "AWS region."
  type        = string
  default     = "us-east-1"
}

variable "availability_zone" {
  description = "Zone of the region in which the instance type can be had; null: the region's first."
  type        = string
  default     = null
}

variable "dataset" {
  description = "Bucket and prefix (s3://bucket/prefix) with train/CLASS/* and val/CLASS/*, shown in the shared file system; null: synthetic images."
  type        = string
  default     = null

  validation {
    condition     = var.dataset == null || can(regex("^s3://", coalesce(var.dataset, "-")))
    error_message = "dataset must begin with s3://."
  }
}

variable "storage_gib" {
  description = "Size of the shared file system: 1200, or a multiple of 2400."
  type        = number
  default     = 1200

  validation {
    condition     = var.storage_gib == 1200 || (var.storage_gib >= 2400 && var.storage_gib % 2400 == 0)
    error_message = "storage_gib must be 1200 or a multiple of 2400."
  }
}
