# terraform test: plans against a provider that is made up, so no account is needed and nothing costs.
# That a destroy is refused is tested from outside (tests/deployment/test_terraform.py).

mock_provider "aws" {
  mock_data "aws_availability_zones" {
    defaults = { names = ["us-east-1a", "us-east-1b"] }
  }

  override_during = plan

  mock_resource "aws_fsx_lustre_file_system" {
    defaults = {
      id         = "fs-00000000000000000"
      dns_name   = "fs-0.fsx.us-east-1.amazonaws.com"
      mount_name = "abcdefgh"
    }
  }
}

run "what_the_nodes_are_told" {
  command = plan

  assert {
    condition     = output.cluster.storage.address == "fs-0.fsx.us-east-1.amazonaws.com@tcp:/abcdefgh" && output.cluster.storage.zone == "us-east-1a"
    error_message = "where the file system is"
  }

  assert {
    condition     = aws_fsx_lustre_file_system.shared.deployment_type == "PERSISTENT_2"
    error_message = "checkpoints outlive a server"
  }

  assert {
    condition     = length(aws_fsx_data_repository_association.dataset) == 0 && !output.cluster.storage.dataset
    error_message = "no bucket, no images"
  }

  assert {
    condition     = aws_subnet.nodes.map_public_ip_on_launch == false
    error_message = "no machine gets a public address by itself"
  }

  assert {
    condition     = alltrue([for rule in values(aws_vpc_security_group_ingress_rule.storage_itself) : rule.cidr_ipv4 == null])
    error_message = "no rule names addresses"
  }
}

run "dataset" {
  command = plan

  variables {
    dataset           = "s3://bucket/imagenet"
    availability_zone = "us-east-1b"
  }

  assert {
    condition     = one(aws_fsx_data_repository_association.dataset).file_system_path == "/imagenet" && output.cluster.storage.dataset
    error_message = "the bucket is shown where the trainer looks"
  }

  assert {
    condition     = output.cluster.storage.zone == "us-east-1b"
    error_message = "the zone that was asked for"
  }
}

run "bad_input" {
  command = plan

  variables {
    dataset     = "bucket"
    storage_gib = 1000
  }

  expect_failures = [var.dataset, var.storage_gib]
}
