"""The bus between actors: messages, codec, transport. This package imports no other package of the project."""
