"""What a checkpoint folder says of itself: configs, tensor names, layer sequences. Needs no torch."""
