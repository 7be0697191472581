//! The tiny model from quantized files: its outputs against recorded ones, the same weights in every file form, and the
//! weights' memory.

mod at_load;
mod attention;
mod formats;
mod goldens;
mod linears;
mod mistakes;
mod nvfp4_math;
mod transports;
