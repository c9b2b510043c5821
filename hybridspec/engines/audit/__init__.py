"""Does a serving engine stay lossless when it speculates? Offline engines and running servers."""
