"""From the trainer's tensors to the server's parameters: manifest, layout, arena, gather, loader."""
