"""cseq behind the interfaces of other libraries."""
