"""The wire protocol: .proto files and the stubs that are generated from them."""
