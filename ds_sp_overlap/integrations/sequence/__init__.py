"""Facts about the global sequence that every rank needs: positions, documents and masks."""
