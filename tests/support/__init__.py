"""What tests of several rooms use: models, pictures, disks, networks, hosts, processes."""
