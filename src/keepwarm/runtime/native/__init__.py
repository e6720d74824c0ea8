"""The lean decoder: a forward pass in C++. It is compiled on this machine when it is first needed."""
