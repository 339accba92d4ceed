# What must outlive every cluster: the file system with checkpoints, logs and images, and the private
# network in which it is. It has a state of its own, so that `terraform destroy` for the nodes can't touch
# it, and `terraform destroy` here is refused.
#
#     terraform init && terraform apply
#     terraform output -json cluster > ../storage.auto.tfvars.json

terraform {
  required_version = ">= 1.11" # override_during in the tests; validations that look at other variables

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.100"
    }
  }
}

provider "aws" {
  region = var.region

  default_tags {
    tags = { Project = var.name }
  }
}

data "aws_availability_zones" "available" {
  state = "available"

  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"] # no local zones
  }
}

locals {
  zone = coalesce(var.availability_zone, data.aws_availability_zones.available.names[0])
}

resource "aws_vpc" "this" {
  cidr_block           = "10.20.0.0/16"
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = { Name = var.name }
}

# What AWS makes by itself allows everything within it: emptied, so that nothing is in it by mistake.
resource "aws_default_security_group" "unused" {
  vpc_id = aws_vpc.this.id
}

resource "aws_subnet" "nodes" {
  vpc_id            = aws_vpc.this.id
  availability_zone = local.zone
  cidr_block        = "10.20.16.0/20"
  tags              = { Name = "${var.name}-nodes" }

  map_public_ip_on_launch = false
}

resource "aws_security_group" "storage" {
  name        = "${var.name}-storage"
  description = "Lustre, from the nodes"
  vpc_id      = aws_vpc.this.id
}

resource "aws_vpc_security_group_ingress_rule" "storage_itself" {
  for_each = local.lustre_ports

  security_group_id            = aws_security_group.storage.id
  description                  = "Lustre, among its servers"
  referenced_security_group_id = aws_security_group.storage.id
  ip_protocol                  = "tcp"
  from_port                    = each.value.from
  to_port                      = each.value.to
}

resource "aws_vpc_security_group_egress_rule" "storage_itself" {
  for_each = local.lustre_ports

  security_group_id            = aws_security_group.storage.id
  description                  = "Lustre, among its servers"
  referenced_security_group_id = aws_security_group.storage.id
  ip_protocol                  = "tcp"
  from_port                    = each.value.from
  to_port                      = each.value.to
}

locals {
  lustre_ports = {
    portmapper = { from = 988, to = 988 }
    services   = { from = 1018, to = 1023 }
  }
}

resource "aws_fsx_lustre_file_system" "shared" {
  deployment_type             = "PERSISTENT_2" # replicated: checkpoints must outlive a server
  storage_type                = "SSD"
  storage_capacity            = var.storage_gib
  per_unit_storage_throughput = 125 # MB/s per TiB; 1000 can be had, at about four times the price
  data_compression_type       = "LZ4"
  subnet_ids                  = [aws_subnet.nodes.id]
  security_group_ids          = [aws_security_group.storage.id]
  tags                        = { Name = var.name }

  lifecycle {
    prevent_destroy = true # remove this block on the day when the checkpoints may go
  }
}

# Files of the bucket appear at once and are copied when they are first read.
resource "aws_fsx_data_repository_association" "dataset" {
  count = var.dataset == null ? 0 : 1

  file_system_id                   = aws_fsx_lustre_file_system.shared.id
  data_repository_path             = var.dataset
  file_system_path                 = "/imagenet"
  batch_import_meta_data_on_create = true
}

output "cluster" {
  description = "What the nodes need to know: the variable storage of their module."
  value = {
    storage = {
      zone           = local.zone
      vpc            = aws_vpc.this.id
      subnet         = aws_subnet.nodes.id
      cidr           = aws_subnet.nodes.cidr_block
      security_group = aws_security_group.storage.id
      address        = "${aws_fsx_lustre_file_system.shared.dns_name}@tcp:/${aws_fsx_lustre_file_system.shared.mount_name}"
      ports          = local.lustre_ports
      dataset        = var.dataset != null
    }
  }
}
