# Checkpoints, logs and images in one file system that all nodes mount at /shared.

resource "aws_fsx_lustre_file_system" "shared" {
  deployment_type             = "PERSISTENT_2" # replicated: checkpoints must outlive a server
  storage_type                = "SSD"
  storage_capacity            = var.storage_gib
  per_unit_storage_throughput = 125 # MB/s per TiB; 1000 can be had, at about four times the price
  data_compression_type       = "LZ4"
  subnet_ids                  = [aws_subnet.nodes.id]
  security_group_ids          = [aws_security_group.storage.id]
  tags                        = { Name = var.name }
}

# Files of the bucket appear at once and are copied when they are first read.
resource "aws_fsx_data_repository_association" "dataset" {
  count = var.dataset == null ? 0 : 1

  file_system_id                   = aws_fsx_lustre_file_system.shared.id
  data_repository_path             = var.dataset
  file_system_path                 = "/imagenet"
  batch_import_meta_data_on_create = true
}
