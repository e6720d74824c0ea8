"""Folders with weights of 4 bits in safetensors: GPTQ, AWQ and compressed-tensors."""
