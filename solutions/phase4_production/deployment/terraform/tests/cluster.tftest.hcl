# terraform test: plans against a provider that is made up, so no account is needed and nothing costs.

mock_provider "aws" {
  mock_data "aws_ec2_instance_type" {
    defaults = {
      efa_supported          = true
      efa_maximum_interfaces = 4
      gpus                   = [{ count = 8, manufacturer = "NVIDIA", memory_size = 40960, name = "A100" }]
    }
  }

  mock_data "aws_ssm_parameter" {
    defaults = { value = "ami-00000000000000000" }
  }
}

variables {
  storage = {
    zone           = "us-east-1a"
    vpc            = "vpc-00000000000000000"
    subnet         = "subnet-00000000000000000"
    cidr           = "10.20.16.0/20"
    security_group = "sg-00000000000000000"
    address        = "fs-0.fsx.us-east-1.amazonaws.com@tcp:/abcdefgh"
    ports          = { portmapper = { from = 988, to = 988 }, services = { from = 1018, to = 1023 } }
    dataset        = false
  }

  cluster_size    = 3
  training_epochs = 7
  save_frequency  = 11
  repository      = "https://example.com/course.git"
  ssh_cidr        = "203.0.113.7/32"
  ssh_public_key  = "ssh-ed25519 AAAA you@laptop"
}

run "other_types" {
  variables {
    cluster_size  = 1
    instance_type = "g4dn.xlarge"
  }

  override_data {
    target = data.aws_ec2_instance_type.node
    values = {
      efa_supported          = false
      efa_maximum_interfaces = 0
      gpus                   = [{ count = 1, manufacturer = "NVIDIA", memory_size = 16384, name = "T4" }]
    }
  }

  assert {
    condition     = length(aws_instance.node[0].network_interface) == 1 && aws_network_interface.node["0-0"].interface_type != "efa"
    error_message = "one plain interface"
  }

  assert {
    condition     = strcontains(aws_instance.node[0].user_data, "NPROC_PER_NODE=1\n") && !strcontains(aws_instance.node[0].user_data, "FI_PROVIDER")
    error_message = "one rank, no EFA"
  }
}

run "nodes" {
  assert {
    condition     = length(aws_instance.node) == 3 && alltrue([for node in aws_instance.node : length(node.network_interface) == 4])
    error_message = "three nodes, each with the four EFA interfaces of the type"
  }

  assert {
    condition     = alltrue([for card in aws_network_interface.node : card.interface_type == "efa"])
    error_message = "every interface is EFA"
  }

  assert {
    condition     = length(distinct(flatten([for card in aws_network_interface.node : card.private_ips]))) == 12
    error_message = "no two interfaces have the same address"
  }

  assert {
    condition     = aws_placement_group.nodes.strategy == "cluster" && alltrue([for node in aws_instance.node : node.placement_group == aws_placement_group.nodes.name])
    error_message = "all nodes are in the placement group"
  }

  assert {
    condition     = alltrue([for node in aws_instance.node : node.root_block_device[0].encrypted && node.metadata_options[0].http_tokens == "required"])
    error_message = "disks are encrypted, metadata need a token"
  }
}

run "rendezvous" {
  assert {
    condition     = alltrue([for rank, node in aws_instance.node : strcontains(node.user_data, "NODE_RANK=${rank}\n") && strcontains(node.user_data, "NNODES=3\n")])
    error_message = "every node knows its rank and how many there are"
  }

  assert {
    condition     = alltrue([for node in aws_instance.node : strcontains(node.user_data, "MASTER_ADDR=${one(aws_network_interface.node["0-0"].private_ips)}\n")])
    error_message = "every node is told the first one's address"
  }

  assert {
    condition     = alltrue([for node in aws_instance.node : strcontains(node.user_data, "NPROC_PER_NODE=8\n") && strcontains(node.user_data, "FI_PROVIDER=efa\n")])
    error_message = "a rank per GPU, and EFA"
  }

  assert {
    condition     = alltrue([for node in aws_instance.node : strcontains(node.user_data, "--epochs 7 --save-every 11 ")])
    error_message = "training_epochs and save_frequency reach the trainer"
  }

  assert {
    condition     = alltrue([for node in aws_instance.node : strcontains(node.user_data, "fs-0.fsx.us-east-1.amazonaws.com@tcp:/abcdefgh /shared lustre")])
    error_message = "every node mounts the shared file system"
  }

  assert {
    condition     = alltrue([for node in aws_instance.node : can(yamldecode(node.user_data)) && length(yamldecode(node.user_data).write_files) == 2])
    error_message = "cloud-init is YAML with two files"
  }

  assert {
    condition     = alltrue([for node in aws_instance.node : strcontains(yamldecode(node.user_data).write_files[1].content, "\nRestartPreventExitStatus=78 126 127\n")])
    error_message = "a refused run is not started again"
  }
}

run "nothing_public_but_ssh" {
  assert {
    condition = alltrue([for rule in concat(
      [aws_vpc_security_group_ingress_rule.bastion_ssh, aws_vpc_security_group_ingress_rule.nodes_ssh, aws_vpc_security_group_ingress_rule.nodes_among_themselves],
      values(aws_vpc_security_group_ingress_rule.storage_nodes), values(aws_vpc_security_group_ingress_rule.nodes_storage)
    ) : rule.cidr_ipv4 == null || (rule.cidr_ipv4 == "203.0.113.7/32" && rule.from_port == 22 && rule.to_port == 22)])
    error_message = "the only rule that names addresses is SSH from ssh_cidr"
  }

  assert {
    condition     = aws_subnet.public.map_public_ip_on_launch == false
    error_message = "no machine gets a public address by itself"
  }
}

run "several_nodes_need_efa" {
  command = plan

  override_data {
    target = data.aws_ec2_instance_type.node
    values = {
      efa_supported          = false
      efa_maximum_interfaces = 0
      gpus                   = []
    }
  }

  expect_failures = [aws_instance.node]
}

run "dataset" {
  variables {
    storage = {
      zone           = "us-east-1a"
      vpc            = "vpc-00000000000000000"
      subnet         = "subnet-00000000000000000"
      cidr           = "10.20.16.0/20"
      security_group = "sg-00000000000000000"
      address        = "fs-0.fsx.us-east-1.amazonaws.com@tcp:/abcdefgh"
      ports          = { portmapper = { from = 988, to = 988 }, services = { from = 1018, to = 1023 } }
      dataset        = true
    }
    spot = true
  }

  assert {
    condition     = strcontains(aws_instance.node[0].user_data, "--data /shared/imagenet ")
    error_message = "the trainer reads what the storage shows"
  }

  assert {
    condition     = alltrue([for node in aws_instance.node : node.instance_market_options[0].spot_options[0].instance_interruption_behavior == "stop"])
    error_message = "interrupted nodes come back"
  }
}

run "region_is_the_storage_s" {
  command = plan

  variables {
    region = "eu-west-1"
  }

  expect_failures = [var.region]
}

run "bad_input" {
  command = plan

  variables {
    cluster_size    = 0
    training_epochs = 1.5
    save_frequency  = 0
    repository      = "https://user:secret@example.com/course.git"
    ssh_cidr        = "0.0.0.0/0"
    ssh_public_key  = "-----BEGIN OPENSSH PRIVATE KEY-----"
  }

  expect_failures = [
    var.cluster_size, var.training_epochs, var.save_frequency, var.repository, var.ssh_cidr, var.ssh_public_key,
  ]
}
