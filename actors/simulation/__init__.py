"""The real actors on virtual time, a simulated network and simulated engines. One seed decides everything."""
