"""One weight update on the trainer side: validate the request, write the tensors, and commit them on the servers."""
