"""The library: configuration, data, ledger, algorithms, engines and reports; no actors and none of their messages."""
