"""The disk tier: a folder of runs that processes share."""
