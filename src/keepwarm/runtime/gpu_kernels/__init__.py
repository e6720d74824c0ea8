"""A decoder for GPUs: a forward pass in Triton. It is imported only when the setting `attention` asks for it."""
