"""When a row's inputs are an image."""


def image_shape(input_shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """(channels, height, width) of the inputs, or None when they are not images.

    Inputs of shape (h, w) have one channel; a flat square number of at least 16 inputs, as of ``digits``, is taken
    for a square image.
    """
    match input_shape:
        case (channels, height, width):
            return channels, height, width
        case (height, width):
            return 1, height, width
        case (size,) if size >= 16 and round(size**0.5) ** 2 == size:
            return 1, round(size**0.5), round(size**0.5)
        case _:
            return None
