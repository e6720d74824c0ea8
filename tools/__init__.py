"""Programs that make parts of this repository from other parts."""
