"""Stand-ins for parts of the product and for services beside it."""
