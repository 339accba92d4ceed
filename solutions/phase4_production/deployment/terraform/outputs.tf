output "bastion" {
  description = "Address of the only machine that can be reached from outside."
  value       = aws_instance.bastion.public_ip
}

output "nodes" {
  description = "Addresses of the nodes, the one on which they meet first."
  value       = aws_instance.node[*].private_ip
}

output "ssh" {
  description = "Logs in to the first node."
  value       = "ssh -J ec2-user@${aws_instance.bastion.public_ip} ec2-user@${local.head}"
}

output "metrics" {
  description = "Brings the metrics to http://localhost:9464/metrics."
  value       = "ssh -N -L 9464:localhost:9464 -J ec2-user@${aws_instance.bastion.public_ip} ec2-user@${local.head}"
}
