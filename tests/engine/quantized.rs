//! The tiny model from quantized files: its outputs against recorded ones, the same weights in every form of file, and what is
//! held in memory.

mod at_load;
mod attention;
mod formats;
mod goldens;
mod linears;
mod mistakes;
mod nvfp4_math;
mod transports;
