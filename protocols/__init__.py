"""What actors say to each other and how it travels: messages, codec, transport. Imports no other package here."""
