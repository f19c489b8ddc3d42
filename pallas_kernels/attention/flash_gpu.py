forward = backward = None
