"""The image backend: encoded images in, the input of a network out.

`options` reads the parameters and says where the pixels of an image go, `instance` opens files and resizes a batch's
images in threads, `backend` completes and loads. The package is imported when the first model needs it.

Decisions, with figures in docs/image.md:

1. Pillow decodes. OpenCV's decoder gives the same pixels as fast, but takes a truncated JPEG for a whole one, and tells
   neither size nor orientation before it has decoded.
2. cykooz-resizer resizes, 4 to 10 times as fast as Pillow. Columns first, then rows, as Pillow does it: so a value
   differs by at most 1 of 255. It reads Pillow's images by their layout in memory, hence `resizing.PILLOW_MAJOR_MAX`.
3. Only the part of an image that a crop leaves is resized.
4. Each image is normalised within the array that the response holds.
"""
