"""The HTTP server over the ranks, in OpenAI's form. Part of the front: never imports torch."""
