"""What processes of projects can reach: files, ports, other processes, variables."""
