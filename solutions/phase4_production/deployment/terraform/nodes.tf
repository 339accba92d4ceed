# The nodes: near each other (placement group), with every EFA interface that the type has, at addresses
# that are known beforehand, so that each can be told where the first one is.

data "aws_ec2_instance_type" "node" {
  instance_type = var.instance_type
}

# Ships the NVIDIA driver, EFA and NCCL's plugin for it.
data "aws_ssm_parameter" "node_image" {
  name = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-amazon-linux-2023/latest/ami-id"
}

data "aws_ssm_parameter" "bastion_image" {
  name = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
}

locals {
  efa        = data.aws_ec2_instance_type.node.efa_supported
  interfaces = local.efa ? data.aws_ec2_instance_type.node.efa_maximum_interfaces : 1
  gpus       = sum(concat([0], [for gpu in data.aws_ec2_instance_type.node.gpus : gpu.count]))
  head       = cidrhost(var.storage.cidr, local.first_host)
  first_host = 16 # AWS keeps the first addresses of a subnet for itself

  unit = templatefile("${path.module}/training.service.tftpl", {
    user         = "ec2-user"
    config       = var.config
    data         = var.storage.dataset ? "/shared/imagenet" : "synthetic"
    epochs       = var.training_epochs
    save_every   = var.save_frequency
    stop_seconds = 110 # a spot instance has two minutes
  })

  cards = {
    for card in setproduct(range(var.cluster_size), range(local.interfaces)) :
    "${card[0]}-${card[1]}" => { node = card[0], card = card[1] }
  }
}

resource "aws_placement_group" "nodes" {
  name     = "${var.name}-nodes"
  strategy = "cluster"
}

resource "aws_key_pair" "this" {
  key_name   = var.name
  public_key = var.ssh_public_key
}

resource "aws_network_interface" "node" {
  for_each = local.cards

  subnet_id       = var.storage.subnet
  interface_type  = local.efa ? "efa" : null
  security_groups = [aws_security_group.nodes.id]
  # all are given, so that none that AWS picks is in the way; the first of each node come first
  private_ips = [cidrhost(var.storage.cidr, local.first_host + each.value.card * var.cluster_size + each.value.node)]
  tags        = { Name = "${var.name}-${each.key}" }
}

resource "aws_instance" "node" {
  count = var.cluster_size

  ami                         = nonsensitive(data.aws_ssm_parameter.node_image.value)
  instance_type               = var.instance_type
  placement_group             = aws_placement_group.nodes.name
  key_name                    = aws_key_pair.this.key_name
  ebs_optimized               = true
  monitoring                  = true
  user_data_replace_on_change = true

  user_data = templatefile("${path.module}/cloud-init.yaml.tftpl", {
    repository  = var.repository
    revision    = var.revision
    nodes       = var.cluster_size
    rank        = count.index
    ranks       = max(local.gpus, 1)
    head        = local.head
    efa         = local.efa
    storage     = var.storage.address
    unit        = local.unit
    requirement = "solutions/phase4_production/deployment/requirements.txt"
  })

  dynamic "network_interface" {
    for_each = range(local.interfaces)

    content {
      network_interface_id = aws_network_interface.node["${count.index}-${network_interface.value}"].id
      network_card_index   = network_interface.value
      device_index         = network_interface.value == 0 ? 0 : 1
    }
  }

  dynamic "instance_market_options" {
    for_each = var.spot ? [1] : []

    content {
      market_type = "spot"

      spot_options {
        spot_instance_type             = "persistent"
        instance_interruption_behavior = "stop" # comes back by itself, with its disk
      }
    }
  }

  metadata_options {
    http_tokens = "required"
  }

  root_block_device {
    volume_type = "gp3"
    volume_size = 200
    encrypted   = true
  }

  lifecycle {
    ignore_changes = [ami] # a newer image is no reason to end a training

    precondition {
      condition     = var.cluster_size == 1 || local.efa
      error_message = "${var.instance_type} has no EFA: several nodes would wait for each other most of the time."
    }
  }

  tags = { Name = "${var.name}-node${count.index}" }
}

resource "aws_instance" "bastion" {
  ami                         = nonsensitive(data.aws_ssm_parameter.bastion_image.value)
  instance_type               = "t3.micro"
  subnet_id                   = aws_subnet.public.id
  vpc_security_group_ids      = [aws_security_group.bastion.id]
  key_name                    = aws_key_pair.this.key_name
  associate_public_ip_address = true # the only one, and for SSH from ssh_cidr only

  metadata_options {
    http_tokens = "required"
  }

  root_block_device {
    encrypted = true
  }

  lifecycle {
    ignore_changes = [ami]
  }

  tags = { Name = "${var.name}-bastion" }
}
