"""Building blocks of tensor and context parallelism. The engine is made of them; they also stand alone, with autograd.

`ranges`      who has which positions of a sequence: pure functions
`collectives` sums and gathers whose gradients are those of one device
`sequence`    a sequence scattered over ranks and gathered again, however uneven
`linear`      linear layers and embeddings that are cut over ranks
`norm`        RMSNorm over a width that is cut over ranks
`attention`   attention to keys and values that are spread over ranks

Every function takes the communicator of the ranks that share (see runtime/communicator.py), which all of them call in
the same order. Gradients equal those of one device when every rank computes the same loss from whole results, and runs
backward; a tensor that a rank has a part of gets its part of the gradient, a tensor that all have gets all of it.
"""
