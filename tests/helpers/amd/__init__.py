"""An emulator of AMD GPUs, for the compiled Triton kernels. Start reading at :mod:`.driver`.

Instructions are decoded by tinygrad. What they do is written here, in numpy, over the lanes of a wave; ``pseudocode``
checks it against AMD's own text.
"""
