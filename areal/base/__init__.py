"""What every other room uses: errors, texts, processes, secrets, plug-ins. It imports no other room."""
