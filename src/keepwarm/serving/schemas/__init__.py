"""What the protocols' bodies look like. An unknown field is an error, so that none is ignored."""
