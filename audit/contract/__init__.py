"""What programs in any language agree on: the identity header, events, sets of sequences, digests. Pure."""
