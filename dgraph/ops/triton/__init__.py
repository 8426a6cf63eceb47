"""Triton kernels of the ops of dgraph on CUDA devices. One op per file, each with a function `kernel`.

`kernel` takes the arguments of the op and follows its contract. Beyond that,

 - it reads nothing back to the host, and the sizes of what it allocates and launches follow from the shapes
   of its arguments, so that it can be captured in a CUDA graph and replayed with other contents;
 - its sums have a fixed order: the same arguments give the same bits;
 - an error of a reference that depends on values on the device (a full bucket, a page that is not
   assigned) is undefined behaviour here, though never a write outside of a result.

Float64 is for the references alone. This package imports nothing: `dgraph.ops.registry` imports a file of it
when its op first meets a CUDA tensor.
"""
