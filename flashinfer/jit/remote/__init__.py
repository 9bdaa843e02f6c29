"""Remote stores of ``FLASHINFER_STORE``, from which a build fetches artifacts of other machines.

A process without a store imports none of these files: ``transfer`` (fetch and publish) -> ``objects`` (format),
``signing`` -> ``transport`` (reads and writes).
"""
