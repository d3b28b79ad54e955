"""`cudiff play`: a page on this machine whose controls redraw a model's pictures as they move."""
