# One public subnet with the way in (a bastion for SSH) and the way out (NAT), beside the private subnet
# of storage/ with the nodes and the shared file system.

resource "aws_subnet" "public" {
  vpc_id            = var.storage.vpc
  availability_zone = var.storage.zone
  cidr_block        = "10.20.0.0/24"
  tags              = { Name = "${var.name}-public" }

  map_public_ip_on_launch = false
}

resource "aws_internet_gateway" "this" {
  vpc_id = var.storage.vpc
  tags   = { Name = var.name }
}

resource "aws_eip" "nat" {
  domain     = "vpc"
  tags       = { Name = "${var.name}-nat" }
  depends_on = [aws_internet_gateway.this]
}

resource "aws_nat_gateway" "this" {
  allocation_id = aws_eip.nat.id
  subnet_id     = aws_subnet.public.id
  tags          = { Name = var.name }
}

resource "aws_route_table" "public" {
  vpc_id = var.storage.vpc
  tags   = { Name = "${var.name}-public" }

  route {
    cidr_block = "0.0.0.0/0"
    gateway_id = aws_internet_gateway.this.id
  }
}

resource "aws_route_table" "nodes" {
  vpc_id = var.storage.vpc
  tags   = { Name = "${var.name}-nodes" }

  route {
    cidr_block     = "0.0.0.0/0"
    nat_gateway_id = aws_nat_gateway.this.id
  }
}

resource "aws_route_table_association" "public" {
  subnet_id      = aws_subnet.public.id
  route_table_id = aws_route_table.public.id
}

resource "aws_route_table_association" "nodes" {
  subnet_id      = var.storage.subnet
  route_table_id = aws_route_table.nodes.id
}

# --- who may talk to whom

resource "aws_security_group" "bastion" {
  name        = "${var.name}-bastion"
  description = "SSH from the given range, and on to the nodes"
  vpc_id      = var.storage.vpc
}

resource "aws_security_group" "nodes" {
  name        = "${var.name}-nodes"
  description = "The nodes among themselves, as EFA asks for, and SSH from the bastion"
  vpc_id      = var.storage.vpc
}

resource "aws_vpc_security_group_ingress_rule" "bastion_ssh" {
  security_group_id = aws_security_group.bastion.id
  description       = "SSH"
  cidr_ipv4         = var.ssh_cidr
  ip_protocol       = "tcp"
  from_port         = 22
  to_port           = 22
}

resource "aws_vpc_security_group_egress_rule" "bastion_nodes" {
  security_group_id            = aws_security_group.bastion.id
  description                  = "SSH to the nodes"
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "tcp"
  from_port                    = 22
  to_port                      = 22
}

resource "aws_vpc_security_group_ingress_rule" "nodes_ssh" {
  security_group_id            = aws_security_group.nodes.id
  description                  = "SSH from the bastion"
  referenced_security_group_id = aws_security_group.bastion.id
  ip_protocol                  = "tcp"
  from_port                    = 22
  to_port                      = 22
}

# EFA needs both directions, every protocol, between members of one group: no range of addresses does.
resource "aws_vpc_security_group_ingress_rule" "nodes_among_themselves" {
  security_group_id            = aws_security_group.nodes.id
  description                  = "EFA, NCCL, rendezvous"
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_egress_rule" "nodes_among_themselves" {
  security_group_id            = aws_security_group.nodes.id
  description                  = "EFA, NCCL, rendezvous"
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_egress_rule" "nodes_storage" {
  for_each = var.storage.ports

  security_group_id            = aws_security_group.nodes.id
  description                  = "Lustre"
  referenced_security_group_id = var.storage.security_group
  ip_protocol                  = "tcp"
  from_port                    = each.value.from
  to_port                      = each.value.to
}

resource "aws_vpc_security_group_egress_rule" "nodes_https" {
  security_group_id = aws_security_group.nodes.id
  description       = "Packages and the repository"
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

resource "aws_vpc_security_group_ingress_rule" "storage_nodes" {
  for_each = var.storage.ports

  security_group_id            = var.storage.security_group
  description                  = "Lustre, from the nodes"
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "tcp"
  from_port                    = each.value.from
  to_port                      = each.value.to
}

resource "aws_vpc_security_group_egress_rule" "storage_nodes" {
  for_each = var.storage.ports

  security_group_id            = var.storage.security_group
  description                  = "Lustre, back to the nodes"
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "tcp"
  from_port                    = each.value.from
  to_port                      = each.value.to
}

resource "aws_vpc_security_group_ingress_rule" "nodes_storage" {
  for_each = var.storage.ports

  security_group_id            = aws_security_group.nodes.id
  description                  = "Lustre, back from its servers"
  referenced_security_group_id = var.storage.security_group
  ip_protocol                  = "tcp"
  from_port                    = each.value.from
  to_port                      = each.value.to
}
