"""What a sequence holds, and how each layer of it takes tokens back."""
