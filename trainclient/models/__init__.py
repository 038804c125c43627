"""ViT encoder, Llama-style backbone and diffusion generator in plain torch."""
