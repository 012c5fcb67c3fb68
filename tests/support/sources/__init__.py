"""Files of other formats that tools convert and decoders read; no set of ours."""
