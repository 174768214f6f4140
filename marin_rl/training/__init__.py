"""Everything that changes parameters: the model, its losses, the optimizer step and the loop."""
