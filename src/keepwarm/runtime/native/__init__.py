"""The lean decoder: a forward pass in C++ for steps of few rows, compiled on this machine when it is first needed."""
