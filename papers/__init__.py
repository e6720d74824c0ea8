"""What reproduces the figures of papers, with Keepwarm as it is installed. See README.md."""
