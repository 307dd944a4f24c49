"""The library: configuration, data, ledger, algorithms, engines and reports; no sockets and no actors."""
