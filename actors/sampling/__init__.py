"""What a sample takes: sessions, calls, flows to generators and rewards, routing, agents' endpoints."""
