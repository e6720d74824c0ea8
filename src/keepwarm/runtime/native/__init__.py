"""The lean decoder: a forward pass in C++. A wheel brings it compiled; elsewhere this is done at first use."""
